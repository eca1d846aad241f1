"""What a monitor records, a file for each thing. `gradstat.monitor.recorder` has the list of probes."""
