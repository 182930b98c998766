"""All planted faults."""

from __future__ import annotations

from mutants.center import CENTER
from mutants.checkpoint import CHECKPOINT
from mutants.driver import DRIVER
from mutants.labels import LABELS
from mutants.mutant import Mutant
from mutants.optimizers import OPTIMIZERS
from mutants.peers import PEERS
from mutants.protocol import PROTOCOL
from mutants.resume import RESUME
from mutants.server import SERVER
from mutants.speeds import SPEEDS
from mutants.streams import STREAMS
from mutants.tables import TABLES
from mutants.tables_saved import TABLES_SAVED
from mutants.transport import TRANSPORT

MUTANTS: tuple[Mutant, ...] = (
    *PROTOCOL,
    *CENTER,
    *SERVER,
    *CHECKPOINT,
    *TABLES,
    *TABLES_SAVED,
    *TRANSPORT,
    *DRIVER,
    *LABELS,
    *RESUME,
    *OPTIMIZERS,
    *SPEEDS,
    *PEERS,
    *STREAMS,
)
