"""What the tests of torch's face run on their ranks, in processes of their own."""
