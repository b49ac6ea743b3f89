"""The classes of one of SGLang's model files, in the form that SGLang imports."""

import importlib
import os

from rlpost.engines.model_module import MODULE

EntryClass = importlib.import_module(os.environ[MODULE]).EntryClass
