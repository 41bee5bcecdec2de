"""The published planners, one file or one small folder each."""
