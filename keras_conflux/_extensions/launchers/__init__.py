"""How launchers tell a process of the others that it trains with."""
