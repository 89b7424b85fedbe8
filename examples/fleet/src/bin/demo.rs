//! `cargo demo`: compares the routing strategies on a real Envoy in front of a simulated fleet.

use std::process::ExitCode;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use warmroute_fleet::demo::args::{Command, HELP};
use warmroute_fleet::{demo, process};

fn main() -> ExitCode {
    let args = match Command::parse(std::env::args().skip(1)) {
        Ok(Command::Run(args)) => args,
        Ok(Command::Help) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("{error}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("no runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(async {
        tokio::select! {
            result = demo::run(args) => match result {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    eprintln!("{error}");
                    ExitCode::FAILURE
                }
            },
            code = interrupted() => code,
        }
    });
    process::interrupt();
    runtime.shutdown_timeout(Duration::from_secs(2));
    code
}

/// Waits for Ctrl-C, a request to terminate or the terminal's end; the exit code is 128 and the signal's number, as
/// shells expect.
async fn interrupted() -> ExitCode {
    let kinds = [
        SignalKind::interrupt(),
        SignalKind::terminate(),
        SignalKind::hangup(),
    ];
    let [Ok(mut interrupt), Ok(mut terminate), Ok(mut hangup)] = kinds.map(signal) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => ExitCode::from(130),
        _ = terminate.recv() => ExitCode::from(143),
        _ = hangup.recv() => ExitCode::from(129),
    }
}
