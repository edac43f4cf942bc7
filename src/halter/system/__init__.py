"""The machine that a process runs on: folders, paths, processes and forks."""
