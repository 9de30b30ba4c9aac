"""Programs that run on TensorFlow's MirroredStrategy and on ours."""

import importlib
import pkgutil

for _subject in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_subject.name}")
