"""Commands: one file per group; prints, and maps errors to exit codes."""
