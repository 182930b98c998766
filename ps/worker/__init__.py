"""The worker: its loop, under any rule, and the state that it keeps."""
