"""`collectived status`: asks the running job, and shows what came back."""
