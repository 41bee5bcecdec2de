"""What a plan will do: events over resources, memory, time."""
