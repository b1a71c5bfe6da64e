"""A run's directory as one HTML file: `nereus report`."""
