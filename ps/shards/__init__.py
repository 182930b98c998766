"""Several servers for one center: a sequencer that decides, and shards that hold the elements."""
