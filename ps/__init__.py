"""The parameter server: protocol, update rules, center variable, server and client.

Needs the standard library, numpy and ml_dtypes only; neither Spark nor Keras is imported from here. Each folder imports
only from those above it::

    errors       every typed error
    validate     checks of arguments, and the options that a capability of a job excludes
    events       what goes wrong, as log records and as rows of a table
    world        time, threads, connections, files, processes: the system's, or a simulation's
    rules        one file an update rule, both halves of it
    protocol     messages, framing, handshake, wire formats: bytes in, messages out
    transport    sockets with deadlines, TLS, and the clients of driver and worker
    center       the center variable as a state machine: leases, rounds, the commit log
    checkpoint   snapshots of the center
    settings     the options of server and workers: one field each, checked where it is built
    worker       the loop that every worker runs, and what drives it
    server       sockets and threads around the center
    shards       a center that is divided among several servers
    simulation   the same worker loop and center under a virtual clock
"""

if __name__ != "distkeras.ps":
    raise ImportError(f"this folder imports as 'distkeras.ps'. Received: import of {__name__!r}")
