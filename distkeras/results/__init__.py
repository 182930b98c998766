"""What a job leaves behind: tables of history, commits and events."""
