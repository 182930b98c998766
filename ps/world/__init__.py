"""A job's interface to the system: time, threads, connections, files and processes; a simulation has its own."""
