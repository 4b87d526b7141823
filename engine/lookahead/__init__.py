"""Which requests a decode worker lets in, and which give way, by predicted need. Pure; imports neither torch nor a
worker. Policies: `OnDemand` (base.py) and `Lookahead`."""
