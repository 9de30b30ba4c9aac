"""Tells the relation of a traced step's tensors to its samples.

This is a library of its own. It reads a graph of TensorFlow and runs nothing
on replicas: neither the core nor an extension is imported here, and they import
the names below, alone, beside `_graphs`. `docs/design/batch-analysis.md` can
be read in place of the code, and lists the questions that it answers.
"""

# ruff: noqa: F401
# pyright: reportUnusedImport=false
from keras_conflux._batch_analysis.analysis import KindInference
from keras_conflux._batch_analysis.analysis import parts_of
from keras_conflux._batch_analysis.blocks import are_of_a_sample
from keras_conflux._batch_analysis.blocks import counted_rows
from keras_conflux._batch_analysis.blocks import split_blocks
from keras_conflux._batch_analysis.derivation import Derivation
from keras_conflux._batch_analysis.derivation import NotDerivable
from keras_conflux._batch_analysis.derivation import derivation_of
from keras_conflux._batch_analysis.drawn import DRAWING
from keras_conflux._batch_analysis.kinds import COUNT
from keras_conflux._batch_analysis.kinds import COUNTED
from keras_conflux._batch_analysis.kinds import DERIVED
from keras_conflux._batch_analysis.kinds import EQUAL
from keras_conflux._batch_analysis.kinds import MEAN
from keras_conflux._batch_analysis.kinds import OPAQUE
from keras_conflux._batch_analysis.kinds import TOTAL
from keras_conflux._batch_analysis.kinds import Entries
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import combined
from keras_conflux._batch_analysis.kinds import kind_of_filled
from keras_conflux._batch_analysis.kinds import mixed_rows
from keras_conflux._batch_analysis.kinds import rows
from keras_conflux._batch_analysis.own_draws import draws_shared_by_samples
from keras_conflux._batch_analysis.own_gradients import OwnGradients
from keras_conflux._batch_analysis.rules import CODE
from keras_conflux._batch_analysis.rules import sources_of_entries
from keras_conflux._batch_analysis.trial import kind_by_trial
from keras_conflux._batch_analysis.trial import rows_by_trial
from keras_conflux._batch_analysis.trial import uses
