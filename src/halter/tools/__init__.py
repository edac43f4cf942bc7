"""Tools of agents: functions, files, programs and the web. Each tool runs only with a permit."""
