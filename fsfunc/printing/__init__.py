"""What is printed for people: amounts in words, and tables and lines on rich."""
