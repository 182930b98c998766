"""Jobs on a cluster of three executors under faults, and what must hold for them."""
