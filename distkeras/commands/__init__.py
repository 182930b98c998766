"""The command `distkeras`: train, score, rules, server, serve, jobs, completion."""
