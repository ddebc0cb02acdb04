"""The command line; each subcommand imports its room when it runs."""
