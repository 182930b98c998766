"""Jobs at work: each is a process of its own, with a session, a folder and a log of its own."""
