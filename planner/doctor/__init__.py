"""`plan doctor`: looks at what this machine has of what the planner needs."""
