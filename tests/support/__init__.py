"""What several tests share: toy models, servers, workers that can be killed, transcriptions of the papers."""
