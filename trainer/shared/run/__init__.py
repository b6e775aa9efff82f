"""What a run is: its keys, how they are read and which values go together; and how wrong input is told."""
