"""Small batches in one round trip: values travel with the question or with the answer, over connections of their own.

Find + READ and Reserve + WRITE + Commit take two and three round trips, and each wakes a sleeping core twice. For
batches of a few MiB that is most of what they cost. A connection begins as a lean one, whose handshake it has passed,
and is then handed to a thread that knows only these two questions.
"""
