"""What reports have taught about all instances together; what they teach about one is kept with that one. Pure."""

from __future__ import annotations

from conductor.cost.accuracy import Accuracy
from conductor.cost.overhead import Overhead
from conductor.cost.overtaking import Overtaking
from protocol.output_length import OutputLengths


class Learned:
    """How long answers are, what comes that nobody foresaw, and how good predictions were."""

    def __init__(self) -> None:
        self.lengths = OutputLengths()
        self.accuracy = Accuracy()
        self.overtaking = Overtaking()
        self.overhead = Overhead()

    def validate(self) -> None:
        self.lengths.validate()
        self.accuracy.validate()
        self.overtaking.validate()
        self.overhead.validate()
