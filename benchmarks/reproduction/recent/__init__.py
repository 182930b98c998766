"""Claims of papers from 2022 on: outer optimizers, buffers, refusals, and windows that follow a worker's speed."""
