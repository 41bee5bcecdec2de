"""Results for people: a run's report page, pictures of timelines, traces and tables."""
