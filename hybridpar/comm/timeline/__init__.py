"""What happened when: recording, saving and drawing it."""
