"""The live page of a job: one record of it, a journal that browsers follow, and the page itself."""
