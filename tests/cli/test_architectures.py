"""``plan --hf`` over the architectures of transformers that are most used.

Each is planned for what it is trained for, in small: over an axis of the data, with its
layers split, and in stages. What cannot be planned is refused, with the way out.
"""

from __future__ import annotations

import json
import logging
import re
import warnings

import pytest

import fsfunc as ff
from fsfunc.cli.build_scripts import Refused, plan_build
from fsfunc.cli.hugging_face import HuggingFaceStep
from fsfunc.cli.plan_command import describe_model

pytest.importorskip("transformers")
TABLE_HERE
