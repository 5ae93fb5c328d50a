// node shoot.mjs PAGE_URL OUT.png BROWSER: waits for the page, takes its picture, prints a line per panel.
import {chromium} from 'playwright-core';

const [url, out, executablePath] = process.argv.slice(2);
const args = '--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync';
const browser = await chromium.launch({executablePath, args: args.split(' ')});
const page = await browser.newPage({viewport: {width: 1600, height: 1000}});
const errors = [];
page.on('pageerror', error => errors.push(String(error).slice(0, 500)));
page.on('console', message => message.type() === 'error' && errors.push(message.text().slice(0, 500)));
const weights = {Regular: 400, Medium: 500}; // Grafana's style sheet asks its own server for its font
await page.route(/Inter-(Regular|Medium)\.woff2/, route => {
  const [, name] = route.request().url().match(/Inter-(\w+)\.woff2/);
  return route.fulfill({path: `node_modules/@fontsource/inter/files/inter-latin-${weights[name]}-normal.woff2`});
});
await page.goto(url);
await page.waitForFunction('window.__done', undefined, {timeout: 60000}).catch(error => errors.push(String(error)));
await page.waitForTimeout(2000); // uPlot sizes its canvases in a frame of its own
await page.screenshot({path: out, fullPage: true});
for (const line of await page.$$eval('[data-panel]', all => all.map(x => `${x.dataset.state}\t${x.dataset.panel}`))) console.log(line);
errors.forEach(error => console.error(error));
await browser.close();
process.exit(errors.length ? 1 : 0);
