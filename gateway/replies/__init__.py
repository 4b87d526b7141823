"""What clients are answered: whole bodies, streams of events, and what both end with."""
