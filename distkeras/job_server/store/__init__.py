"""What the job server remembers: jobs, users, tokens, and who did what."""
