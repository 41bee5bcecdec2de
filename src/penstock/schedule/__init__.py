"""The order of work in a pipeline: actions, schedules, and checks of both."""
