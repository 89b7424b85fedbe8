//! `just calibrate`: fits the engine model to real vLLM servers and checks what it then predicts.

use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    match warmroute_fleet::calibrate::run(std::env::args().skip(1)).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("calibrate: {message}");
            ExitCode::from(2)
        }
    }
}
