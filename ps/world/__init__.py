"""What a job receives from the system: time, threads, connections, files and processes; a simulation has its own."""
