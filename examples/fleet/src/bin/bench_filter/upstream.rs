//! Upstreams that answer at once, so that only Envoy is measured.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

/// Starts that many servers; they read each request to its end and answer at once.
pub(super) async fn start(count: usize) -> std::io::Result<Vec<SocketAddr>> {
    let mut addresses = Vec::new();
    for _ in 0..count {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        addresses.push(listener.local_addr()?);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let _ = stream.set_nodelay(true);
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service_fn(answer));
                tokio::spawn(async move {
                    // Envoy closes as it likes.
                    let _ = connection.await;
                });
            }
        });
    }
    Ok(addresses)
}

async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let is_scrape = request.method() == Method::GET;
    let mut body = request.into_body();
    while let Some(Ok(_)) = body.frame().await {}
    let (kind, text) = if is_scrape {
        ("text/plain", METRICS)
    } else {
        ("application/json", ANSWER)
    };
    let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
}

const ANSWER: &str = concat!(
    r#"{"id":"c","object":"chat.completion","model":"sim","choices":[{"index":0,"message":{"role":"assistant","#,
    r#""content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}"#,
);
/// An idle engine as vLLM shows it.
const METRICS: &str = "vllm:num_requests_running{engine=\"0\",model_name=\"sim\"} 0.0\n\
                       vllm:num_requests_waiting{engine=\"0\",model_name=\"sim\"} 0.0\n\
                       vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"sim\"} 0.0\n\
                       vllm:prefix_cache_queries_total{engine=\"0\",model_name=\"sim\"} 0.0\n\
                       vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"sim\"} 0.0\n\
                       process_start_time_seconds 1.7e+09\n";
