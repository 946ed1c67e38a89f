"""One example: run in a process of its own, and judged by another."""
