"""Virtual workers under a virtual clock, driving the same rules, worker loop and center."""
