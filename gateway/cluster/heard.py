"""What has come of one worker's events, across the streams that brought them: whether some were missed. Pure.

A stream that breaks loses what was on its way, and the worker may go on writing to it after the gateway has noticed;
a gateway that seems to be away for long is given up, with its requests. Either may swallow the last token of a
request, after which nothing would ever come. So the worker says at the begin of each stream how many batches it has
sent and how often it has given this gateway up.
"""

from __future__ import annotations

from protocol.pb import worker_pb2


class Heard:
    """Of one incarnation of a worker."""

    def __init__(self) -> None:
        self._times_given_up = 0
        self._num_batches = 0

    def begins(self, standing: worker_pb2.Standing) -> bool:
        """A stream stands. False: events were missed since the last one, or all requests given up."""
        before = (self._times_given_up, self._num_batches)
        self._times_given_up, self._num_batches = standing.times_given_up, standing.num_batches
        return before == (standing.times_given_up, standing.num_batches)

    def came(self) -> None:
        """A batch that is not a stream's first."""
        self._num_batches += 1
