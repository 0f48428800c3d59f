"""What MemScale shows: on the console and in log files."""
