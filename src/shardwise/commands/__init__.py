"""The subcommands of `shardwise`, each the `COMMAND` of the module of its name."""
