"""The doctor: looks at logs, configurations, running engines and the machine, and names the first cause."""
