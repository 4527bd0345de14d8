"""nn.Module in and out: modules as functions, cut into units."""
