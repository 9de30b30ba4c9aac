"""The ways in which something leaves a step that replicas must make global.

Gradients, writes, returns, choices and draws: whatever a step computes from a
replica's own samples stays inside of it, unless it leaves by one of these.
"""

import dataclasses
from typing import Any

from keras_conflux._common.trees import Tree
from keras_conflux._replication.steps import Part


@dataclasses.dataclass
class TraceFindings:
    """Reasons in traces to trace their step in another way.

    It is seen only where a step writes or draws. A variable may have a single
    copy, because no layer of the model holds it. A value, or the number of
    values that are drawn, may be of constants alone, one of which may be the
    number of a replica's samples, if that is known while tracing. Nobody can
    tell it from a constant of the program, which is the same on all replicas.
    Twice as many rows as samples may be drawn for two rows of each sample, or
    for two batches; their use shows which.
    """

    untracked: dict[int, Any] = dataclasses.field(default_factory=dict)
    """By id, the variables with a single copy that the step writes."""
    counted: str | None = None
    """Its use of a number that may be the number of its samples."""
    by_sample: set[int] = dataclasses.field(default_factory=set)
    """The multiples of the samples' number that are several rows of each."""
    built: bool = False
    """Whether it has built an optimizer, which code may have found unbuilt."""


class TraceAgain(Exception):
    """A step was traced and has to be traced again before it runs."""

    def __init__(self, findings: TraceFindings) -> None:
        super().__init__("A step has to be traced again.")
        self.findings = findings


class Exit(Part):
    """One of the ways out of the step of one replica."""

    counted: str | None = None
    """Its use of a number that may be the number of the replica's samples."""

    def end(self, output: Tree) -> Tree:
        """Makes values global that have left a step, and returns its result."""
        return output

    def report(self, findings: TraceFindings) -> None:
        """Adds reasons against the trace."""
        findings.counted = findings.counted or self.counted
