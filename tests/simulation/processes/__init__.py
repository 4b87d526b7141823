"""The cluster's processes, put together as their own entry points do, over simulated network, memory, model and time.

Everything that decides or awaits is the product's: states, services, servicers, clients, membership. Each process is
one `Life`; `validate` runs after every event of its state.
"""

from tests.simulation.processes.conductor import Conductor
from tests.simulation.processes.decode import Decode
from tests.simulation.processes.front import Front
from tests.simulation.processes.member import CONDUCTOR
from tests.simulation.processes.pool import DIRECTORY, PoolDirectory, PoolNode
from tests.simulation.processes.prefill import Prefill
from tests.simulation.processes.process import Process
from tests.simulation.processes.store import Store

__all__ = [
    "CONDUCTOR",
    "DIRECTORY",
    "Conductor",
    "Decode",
    "Front",
    "PoolDirectory",
    "PoolNode",
    "Prefill",
    "Process",
    "Store",
]
