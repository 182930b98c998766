"""Jobs on a cluster of three executors under faults, and checks of what must hold for them."""
