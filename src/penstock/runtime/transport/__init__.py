"""Messages between ranks: what they contain and how they are sent."""
