"""What agents act with: functions, files, programs and the web. Each tool acts only with a permit."""
