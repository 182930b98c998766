"""The database of the job server: jobs, users, tokens, and the audit log."""
