"""Express connections: get or put a small batch in one round trip, with the values in the request or the response.

Find + READ and Reserve + WRITE + Commit take two and three round trips, and each wakes a sleeping core twice. For
batches of a few MiB this is most of their cost. A connection starts as a lean RPC connection, passes its handshake, and
is then handed to a thread that serves only get and put.
"""
